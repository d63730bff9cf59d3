"""A stock ClientApp: it trains the model that it gets, and sends it back."""

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .task import CLASSES, Net, examples, train

app = ClientApp()


@app.train()
def fit(msg, context):
    number = int(context.node_config["partition-id"])
    # Each client lacks two of the four classes.
    images, labels = examples(number, classes=[number % CLASSES, (number + 1) % CLASSES])
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    train(model, images, labels, int(msg.content["config"]["epochs"]))
    metrics = MetricRecord({"num-examples": len(labels)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)
