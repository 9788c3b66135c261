"""Hugging Face models: where their sites are, and how grafts are put in and taken out."""
