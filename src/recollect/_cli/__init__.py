"""The command line: one file for each command, registered in `app`."""
