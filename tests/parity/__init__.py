"""Comparison with the Hugging Face implementation: same weights, same prompts, in float32."""
