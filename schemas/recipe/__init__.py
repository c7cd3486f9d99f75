"""The recipe: its classes, and how a file becomes one."""
