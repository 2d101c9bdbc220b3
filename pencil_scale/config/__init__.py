"""The config file: its keys, its loader, its help page, and the command line of every job."""
