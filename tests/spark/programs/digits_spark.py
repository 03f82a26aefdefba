"""A program like those for TensorFlowOnSpark: it trains on rows that Spark feeds, then infers."""

import argparse

from pyspark import SparkConf, SparkContext


def main_fun(args, ctx):
    import numpy as np
    import tensorflow as tf
    from tensorflowonspark import TFNode, compat

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    tf_feed = TFNode.DataFeed(ctx.mgr, True)

    def rdd_generator():
        while not tf_feed.should_stop():
            batch = tf_feed.next_batch(1)
            if len(batch) > 0:
                example = batch[0]
                image = np.array(example[0]).astype(np.float32) / 16.0
                label = np.array(example[1]).astype(np.int64)
                yield (image, label)
            else:
                return

    ds = tf.data.Dataset.from_generator(
        rdd_generator, (tf.float32, tf.int64), (tf.TensorShape([64]), tf.TensorShape([]))
    )
    ds = ds.batch(args.batch_size, drop_remainder=True)
    options = tf.data.Options()
    compat.disable_auto_shard(options)
    ds = ds.with_options(options)

    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Input([64]), tf.keras.layers.Dense(10)])
        optimizer = tf.keras.optimizers.SGD(learning_rate=0.2)
        optimizer.build(model.trainable_variables)

    def replica(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(images, labels):
        return strategy.reduce("SUM", strategy.run(replica, (images, labels)), axis=None)

    # Partitions differ in size. No worker may wait for rows that another worker did not get.
    steps = int(args.images * args.epochs / args.batch_size / ctx.num_workers * 0.8)
    batches = iter(strategy.distribute_datasets_from_function(lambda _: ds))
    for _ in range(steps):
        loss = train_step(*next(batches))
    print("trained", steps, "steps, loss", float(loss), flush=True)
    compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")
    tf_feed.terminate()


def inference(args, ctx):
    import numpy as np
    import tensorflow as tf
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    shard = slice(ctx.worker_num, None, ctx.num_workers)
    serve = tf.saved_model.load(args.export_dir).signatures["serving_default"]
    (name,) = serve.structured_input_signature[1]
    batch = tf.constant(images[shard] / 16.0, tf.float32)
    (logits,) = serve(**{name: batch}).values()
    right = float(np.mean(np.argmax(logits, axis=1) == labels[shard]))
    with open(f"{args.output}-{ctx.worker_num}", "w") as output:
        output.write(str(right))


if __name__ == "__main__":
    from sklearn.datasets import load_digits
    from tensorflowonspark import TFCluster, TFParallel

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--cluster_size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--export_dir")
    parser.add_argument("--output")
    parser.add_argument("--tensorboard", action="store_true")
    args = parser.parse_args()

    sc = SparkContext(conf=SparkConf().setAppName("digits_spark"))
    images, labels = load_digits(return_X_y=True)
    rows = list(zip(images.tolist(), labels.tolist(), strict=True))
    args.images = len(rows)
    cluster = TFCluster.run(
        sc,
        main_fun,
        args,
        args.cluster_size,
        num_ps=0,
        tensorboard=args.tensorboard,
        input_mode=TFCluster.InputMode.SPARK,
        master_node="chief",
    )
    cluster.train(sc.parallelize(rows, 5), args.epochs)
    cluster.shutdown(grace_secs=10)
    TFParallel.run(sc, inference, args, args.cluster_size)
    sc.stop()
