"""Identity of a computation: our own code, the installed libraries, the machine and its container image."""
