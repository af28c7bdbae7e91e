-- Gives each role of the service its password, from the environment of psql.
-- Changing a password is: set the variable, run this again, restart the service.
\getenv api_password API_PASSWORD
\getenv relay_password RELAY_PASSWORD
\getenv worker_password WORKER_PASSWORD
\getenv janitor_password JANITOR_PASSWORD
\getenv verify_password VERIFY_PASSWORD

ALTER ROLE onceledger_api PASSWORD :'api_password';
ALTER ROLE onceledger_relay PASSWORD :'relay_password';
ALTER ROLE onceledger_worker PASSWORD :'worker_password';
ALTER ROLE onceledger_janitor PASSWORD :'janitor_password';
ALTER ROLE onceledger_verify PASSWORD :'verify_password';
