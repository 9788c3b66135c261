"""taskgraft: one frozen Transformer, any number of tasks."""
from taskgraft.backbones.api import *
from taskgraft.methods import *
