"""Adapters of the AdapterHub: what `adapters` and adapter-transformers saved becomes a task here, and back.

Their bottlenecks are `tg.Adapter`s of a certain wiring (docs/adapterhub.md has the table), so they train, mix in a
batch and serve like any other; what one format cannot say of the other is refused with a sentence.
"""
