"""Functions of nodes as source code, for programs that tests run in a separate process."""

#: Answers each row with its square; a parameter server waits.
SQUARES = """
def squares(_, ctx):
    if ctx.job_name == "ps":
        import threading
        threading.Event().wait()
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        batch = feed.next_batch(16)
        if batch:
            feed.batch_results([number * number for number in batch])
"""
