"""The stages, one a file, with the training loop, the artifact store and the ledger they share."""
