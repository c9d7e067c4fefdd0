"""What is called beside training: whole parameters, audits, comparisons, clipping."""
