"""Identity of what computes: our own code, the installed libraries, the machine and its container image."""
