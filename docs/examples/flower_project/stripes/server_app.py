"""The ServerApp: another strategy than FedAvg, and nothing else."""

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp

from oneshot_fl import Tally

from .task import CLASSES, SHAPE, Net, accuracy

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = Tally(Net, num_classes=CLASSES, input_shape=SHAPE)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"epochs": context.run_config["epochs"]}),
        num_rounds=1,
    )
    print(f"accuracy of the student: {accuracy(strategy.outcome):.1f} %")
