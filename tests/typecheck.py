"""The checker of the import hook: beartype, with an int accepted where a float is annotated, as PEP 484 has it."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
