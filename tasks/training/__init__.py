"""Parts of every stage's loop: batches, optimiser steps, checkpoints, the logs of an attempt."""
