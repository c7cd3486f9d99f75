"""The loop that every stage has: batches, optimiser steps, checkpoints, the books of an attempt."""
