"""Workloads, made by pure functions of their arguments, of which one is a seed.

- `slora`: S-LoRA's generator, as in its paper and as in its code.
- `synthetic`: independent requests (Zipf, uniform), flash crowd.
- `clients`: many clients whose rates drift and whose requests come in bursts.
- `traces`: recorded requests, halved, labelled and rescaled.
- `draws`: what these draw from.
"""
