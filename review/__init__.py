"""What is read of runs that have ended: audits, differences, reports, exported pages. Nothing here writes what a run reads."""
