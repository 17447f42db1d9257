"""The axes: one file each, on torch's own DeviceMesh, DTensor, FSDP2 and pipelining."""
