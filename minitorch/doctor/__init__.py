"""Diagnose this environment: probes, rules and the report.  Uses the standard library only."""
