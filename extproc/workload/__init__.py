"""How workloads are made: pure functions of their arguments, of which one is a seed.

- `slora`: S-LoRA's generator, as its paper states it and as its code does it.
- `synthetic`: independent requests (Zipf, uniform), flash crowd, shared prompt beginnings.
- `clients`: many clients whose rates drift and whose requests come in bursts.
- `traces`: recorded requests, halved, labelled and rescaled.
- `draws`: what these draw from.
"""
