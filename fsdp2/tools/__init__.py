"""Functions that a user calls beside training: unsharded parameters, audits, comparisons, clipping, padding reports."""
