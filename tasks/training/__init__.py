"""The loop that every stage has: batches, optimiser steps, checkpoints, the logs of an attempt."""
