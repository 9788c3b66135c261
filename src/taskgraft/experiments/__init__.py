"""The papers' experiments, one short module each, behind `taskgraft reproduce NAME`."""
