"""A soak of KV migration: `load` asks, `samples` looks, `verdict` judges, `__main__` runs them."""
