"""What is wrong with this environment: probes, rules, report. Standard library only."""
