"""What scripts of several rooms share: the command line, running scripts in turn."""
