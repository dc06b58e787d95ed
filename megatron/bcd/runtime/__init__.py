"""Device, process groups, random generators, exit codes and files: the base of all other packages."""
