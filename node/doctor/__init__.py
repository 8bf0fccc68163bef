"""What may be wrong with a host or a cluster, and how to mend it. `gather` collects facts, the checks are pure."""
