"""Test whether any decoder draws from its target model's distribution. Nothing here imports the engine."""
