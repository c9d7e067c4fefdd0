"""Kinds of parameters that a plain training has not, and what users do to parameters.

Kinds: DTensors of tensor parallelism, annotated ones, subclasses that gather themselves, ties. What users do: assign,
move, load, initialise, cast buffers. The engine enters where a parameter is planned or built (`tensor_parallel`,
`subclasses`, `ties`), where it looks at what is registered (`replacements`, `empty_memory`, `cast_buffers`), and
where it makes the class of sharded modules (`parameter_methods`).
"""
