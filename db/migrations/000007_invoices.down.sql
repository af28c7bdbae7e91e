DROP TABLE credit_notes;
DROP TABLE invoice_lines;
DROP TABLE invoices;
DROP TABLE document_numbers;
DROP TABLE order_billing;
