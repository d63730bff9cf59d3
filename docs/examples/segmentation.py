"""A model that is no classifier: a small U-Net that finds squares, trained by three clients and merged once.

Run ``python segmentation.py``, then in the same folder
``oneshot replay run --method ties --model segmentation:UNet --evaluate segmentation:dice``.
"""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from oneshot_fl import OneShotFedAvg, simulate


class UNet(nn.Module):
    """One step down and up, with a skip connection: images [B, 1, H, W] -> logits of their masks."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        deep = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2)
        self.deep = nn.Sequential(nn.MaxPool2d(2), *deep)
        self.up = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        seen = self.down(images)
        return self.up(torch.cat([seen, self.deep(seen)], dim=1))


def squares(seed: int, count: int = 32) -> tuple[Tensor, Tensor]:
    """Return images [N, 1, 16, 16] of noisy squares, and their masks; odd seeds have them further to the right."""
    draws = torch.Generator().manual_seed(seed)
    masks = torch.zeros(count, 1, 16, 16)
    for mask in masks:
        x, y = torch.randint(0, 6, (2,), generator=draws).tolist()
        mask[0, y : y + 6, x + 4 * (seed % 2) : x + 6 + 4 * (seed % 2)] = 1.0
    return masks + 0.5 * torch.randn(masks.shape, generator=draws), masks


def train(model: nn.Module, seed: int, steps: int) -> float:
    """Train a model on one client's masks; return the last loss."""
    (images, masks), optimizer = squares(seed), torch.optim.Adam(model.parameters(), lr=0.02)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(images), masks)
        loss.backward()
        optimizer.step()
    return loss.item()


def dice(model: nn.Module) -> dict[str, float]:
    """Return the Dice coefficient in % on masks that no client has."""
    images, masks = squares(100)
    with torch.no_grad():
        found = model.eval()(images) > 0
    return {"dice": 200 * float((found * masks).sum() / (found.sum() + masks.sum()))}


client, server = ClientApp(), ServerApp()


@client.train()
def fit(message: Message, context: Context) -> Message:
    model = UNet()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = train(model, 1 + int(context.node_config["partition-id"]), steps=30)
    metrics = MetricRecord({"num-examples": 32, "loss": loss})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@server.main()
def main(grid: Grid, _: Context) -> None:
    torch.manual_seed(0)
    start = UNet()
    train(start, 0, steps=30)  # the server's own masks; clients' models must have a common start
    strategy = OneShotFedAvg(UNet, run_dir="run", evaluate_model=dice, compute="in-process")
    strategy.start(grid, ArrayRecord(start.state_dict()))


if __name__ == "__main__":
    simulate(server, client, clients=3)
