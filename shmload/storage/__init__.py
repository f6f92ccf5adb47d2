"""Stores of shards with one small protocol, and folders that keep copies of the shards within a budget.

    store.py                the protocol `Store`; open_store.py opens the store that a path or URL names
    local_store.py          a folder; filesystem_store.py: any file system of fsspec
    s3_store.py             a bucket; client.py makes its `Client`, credentials.py finds the keys, s3_errors.py explains errors
    http_store.py           a web server; web_reader.py: reads by ranges, for it and for buckets, over transport.py
    retry.py                when an operation is repeated; outage.py: what all readers do while a store does not answer
    cache.py                `Cache`: copies of objects. Its folder is a `BudgetedFolder` (budgeted_folder.py), whose contents are in
                            ledger.py, leases in process_leases.py, and the use by one process in folder_session.py

No answer of a store is trusted: the range, length and version of each answer are compared with the request, and a body that breaks
off is continued from where it ended. All retries are made by retry.py. Buckets use botocore, with one client per process and its
own retries turned off. Only head requests and ranged reads use a thin transport over `http.client` (transport.py): bytes are
written once, each read of the socket counts as progress, and it survives a fork. For one range it takes half of boto3's CPU time.

Rejected: urllib3, because its pool takes 1.25 times the CPU time for a signed range of 64 KiB, and its `read` copies (1.7 times for
4 MiB).
"""
