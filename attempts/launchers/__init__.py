"""Launchers run the computation of a stage: in a child process of this machine."""
