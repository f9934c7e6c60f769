"""Our own trace form: a header, then one request a record, as JSONL or Parquet. Both round trips are exact."""
