"""Functions that a user calls beside training: whole parameters, audits, comparisons, clipping, padding reports."""
