"""What of torch is set right for sharded parameters, for the whole process, when the first module is sharded."""
