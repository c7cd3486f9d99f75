-- Run once by PostgreSQL's image, when its data folder is empty.
CREATE DATABASE vantage_prefect;
CREATE DATABASE vantage_mlflow;
CREATE DATABASE vantage_mlflow_auth;
