"""Text to Nanosets: sources are cut into shards of work, and each is tokenised and written by one process.

command.py is what a user calls; sources.py finds the input, files.py and tables.py read it as records.py says; job.py writes a shard,
processes.py on all cores; resume.py goes on where an earlier call was stopped, and report.py says what was read, dropped and written.
"""

from lightning_3d.data.prepare.command import prepare as prepare
