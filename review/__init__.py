"""Read runs that have ended: audits, differences, reports, exported pages. Nothing here writes files that a run reads."""
