"""The loop of the tutorial: torchrun --nproc-per-node=4 docs/examples/train_cnn.py, beside chimera.out."""

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from chimera_runtime import Checkpoints, Layers, Pipeline
from cnn import dataset, layers, loss

B, UPDATES = 8, 40  # items in a micro-batch, updates in all

dist.init_process_group("gloo")
data = dataset()
train, held_out = torch.utils.data.random_split(data, [1920, 128], torch.Generator().manual_seed(0))
example = default_collate([data[i] for i in range(B)])
with Pipeline("chimera.out", Layers(layers()), loss, example) as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    loader = pipe.loader(train, shuffle=True)
    checkpoints = Checkpoints("runs/loop", pipe, optimizer, shared={"data": loader})
    checkpoints.resume()
    while pipe.updates < UPDATES:
        for batch in loader:
            outcome = pipe.step(batch)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if pipe.updates % 20 == 0:
                mean = pipe.evaluate(pipe.loader(held_out))
                checkpoints.save()
                if dist.get_rank() == 0:
                    print(f"update {pipe.updates}  loss {outcome.loss:.4f}  held out {mean:.4f}")
            if pipe.updates == UPDATES:
                break
    checkpoints.close()
    pipe.export_weights("cnn.pt")  # one file, as if one process had trained
dist.destroy_process_group()
