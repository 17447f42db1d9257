"""Estimates and pictures of a run before it starts, from the classes that it will use; no GPU, no processes, no weights.

setting        what decides the sizes, as a recipe says them
parameters     which part of which parameter lies on which rank
trace          one microbatch through a stage in which nothing is computed: what it keeps, and what it sends
timeline       which microbatch is where when
memory         bytes of a rank by kind, at the moment when they are most
communication  bytes and number of collectives of a step, and over which link
time           operations, and how long a step takes at best
estimate       all of that for a run, and whether it fits
report         the estimate as text
search         the best layouts for a number of GPUs
pictures       the timeline, memory and the mesh, drawn
gpus           what is known of GPUs
"""
