"""The main job: train a small Flax transformer on real text, on simulated devices, and check everything."""
