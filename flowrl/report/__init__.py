"""Looking in from another terminal; nothing here imports jax or changes a run."""
