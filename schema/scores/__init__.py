"""Numbers that are reported of scored answers: the statistics, and their summary by data source."""
