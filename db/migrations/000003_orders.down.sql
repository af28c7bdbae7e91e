DROP TABLE refund_taxes;
DROP TABLE refunds;
DROP TABLE payments;
DROP TABLE order_taxes;
DROP TABLE order_lines;
DROP TABLE orders;
