"""What tests of attention share: problems, oracles, tables of options."""
