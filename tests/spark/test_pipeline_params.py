"""Parameters of the estimator and the model, without Spark."""

from __future__ import annotations

import pickle

import pytest
from pyspark.ml import param as pyspark_param

from tfd_notebook.spark import pipeline_params
from tfd_notebook.spark.pipeline_params import HasEpochs, HasMasterNode, HasNumPS, TFParams

MIXINS = [name for name in pipeline_params.__all__ if name.startswith("Has")]


class Trainer(TFParams, HasEpochs, HasMasterNode, HasNumPS):
    """A class of a user that declares a parameter itself."""

    rate = pyspark_param.Param(pyspark_param.Params._dummy(), "rate", "step size")


@pytest.mark.parametrize("name", MIXINS)
def test_each_parameter_has_a_setter_a_getter_and_a_description(name: str) -> None:
    mixin = getattr(pipeline_params, name)
    (param,) = mixin().params
    assert getattr(mixin, param.name).name == param.name
    assert param.doc
    for verb in ("set", "get"):
        method = getattr(mixin, verb + name.removeprefix("Has"))
        assert method.__qualname__ == f"{name}.{method.__name__}"
    assert issubclass(mixin, pyspark_param.Params)
    assert pickle.loads(pickle.dumps(mixin)) is mixin


def test_setters_convert_values_and_return_the_object() -> None:
    trainer = Trainer().setEpochs(3.0).setMasterNode(None).setNumPS(value=2)
    assert (trainer.getEpochs(), trainer.getMasterNode(), trainer.getNumPS()) == (3, None, 2)
    assert trainer.copy({trainer.epochs: 5}).getEpochs() == 5
    with pytest.raises(TypeError):
        trainer.setEpochs("many")


def test_parameters_of_subclasses_are_unchanged() -> None:
    trainer = Trainer()
    assert [param.name for param in trainer.params] == ["epochs", "master_node", "num_ps", "rate"]
    assert not hasattr(trainer, "setTrainer")
    assert "epochs: number of passes over the rows (undefined)" in trainer.explainParams()
