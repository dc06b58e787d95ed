"""Device, process groups, random generators, exit, files: what every other package stands on."""
