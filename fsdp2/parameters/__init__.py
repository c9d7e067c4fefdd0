"""Kinds of parameters that a plain training does not have, what users do to parameters, and what is refused to them.

Kinds: DTensors of tensor parallelism, annotated ones, subclasses that gather themselves, ties. What users do: assign,
move, load, initialise, cast buffers, keep a part after forward. The engine enters where it plans or builds a parameter
(`tensor_parallel`, `subclasses`, `ties`, `secondary_shards`), where it looks at what is registered (`replacements`,
`empty_memory`, `cast_buffers`), where it refuses a read of freed memory (`freed`) or a loss that is made of a gradient
(`cut_graphs`), and where it makes the class of sharded modules (`parameter_methods`).
"""
