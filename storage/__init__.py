"""The artifact store on disk: sealed folders, named by their content, found by stage key."""
