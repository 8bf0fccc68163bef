"""How many GPUs a model and a load need, and how to use them: pure functions of what is known beforehand."""
