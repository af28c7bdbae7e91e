package httpapi

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/labstack/echo/v4"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/idempotency"
	"github.com/onceledger/onceledger/internal/money"
	"github.com/onceledger/onceledger/internal/orders"
)

type createOrderRequest struct {
	CustomerID    string              `json:"customer_id"`
	CustomerEmail string              `json:"customer_email"`
	Currency      string              `json:"currency"`
	Lines         []createLineRequest `json:"lines"`
	Metadata      json.RawMessage     `json:"metadata"`
}

type createLineRequest struct {
	SKU         string  `json:"sku"`
	Description string  `json:"description"`
	Quantity    integer `json:"quantity"`
	UnitAmount  integer `json:"unit_amount"`
	TaxRate     rate    `json:"tax_rate"`
}

func (a *API) createOrder(c echo.Context) error {
	var request createOrderRequest
	body, err := decode(c, &request)
	if err != nil {
		return err
	}
	params := orders.PlaceParams{
		CustomerID: request.CustomerID, CustomerEmail: request.CustomerEmail,
		Currency: request.Currency, Metadata: request.Metadata,
	}
	for _, line := range request.Lines {
		params.Lines = append(params.Lines, orders.LineParams{
			SKU: line.SKU, Description: line.Description,
			Quantity: line.Quantity.or(-1), UnitAmount: line.UnitAmount.or(-1), TaxRate: line.TaxRate.orNone(),
		})
	}
	priced, err := orders.Price(params)
	if err != nil {
		return err
	}
	return a.once(c, body, func(ctx context.Context, tx pgx.Tx) (idempotency.Answer, error) {
		order, err := orders.PlaceTx(ctx, tx, tenant(c), priced, a.stamp(c))
		if err != nil {
			return idempotency.Answer{}, err
		}
		return jsonAnswer(http.StatusCreated, "/v1/orders/"+order.ID.String(), orderBody(order))
	})
}

func (a *API) payOrder(c echo.Context) error {
	var request struct {
		PaymentReference string `json:"payment_reference"`
	}
	id, err := pathID(c, orders.ErrNotFound)
	if err != nil {
		return err
	}
	body, err := decode(c, &request)
	if err != nil {
		return err
	}
	params := orders.PayParams{Reference: request.PaymentReference}
	if err := params.Validate(); err != nil {
		return err
	}
	return a.once(c, body, func(ctx context.Context, tx pgx.Tx) (idempotency.Answer, error) {
		order, err := orders.PayTx(ctx, tx, tenant(c), id, params, a.stamp(c))
		if err != nil {
			return idempotency.Answer{}, err
		}
		return jsonAnswer(http.StatusOK, "", orderBody(order))
	})
}

func (a *API) cancelOrder(c echo.Context) error {
	id, err := pathID(c, orders.ErrNotFound)
	if err != nil {
		return err
	}
	body, err := empty(c)
	if err != nil {
		return err
	}
	return a.once(c, body, func(ctx context.Context, tx pgx.Tx) (idempotency.Answer, error) {
		order, err := orders.CancelTx(ctx, tx, tenant(c), id, a.stamp(c))
		if err != nil {
			return idempotency.Answer{}, err
		}
		return jsonAnswer(http.StatusOK, "", orderBody(order))
	})
}

func (a *API) refundOrder(c echo.Context) error {
	var request struct {
		Amount integer `json:"amount"`
		Reason string  `json:"reason"`
	}
	id, err := pathID(c, orders.ErrNotFound)
	if err != nil {
		return err
	}
	body, err := decode(c, &request)
	if err != nil {
		return err
	}
	params := orders.RefundParams{Amount: request.Amount.or(-1), Reason: request.Reason}
	if err := params.Validate(); err != nil {
		return err
	}
	return a.once(c, body, func(ctx context.Context, tx pgx.Tx) (idempotency.Answer, error) {
		refund, err := orders.RefundTx(ctx, tx, tenant(c), id, params, a.stamp(c))
		if err != nil {
			return idempotency.Answer{}, err
		}
		return jsonAnswer(http.StatusCreated, "/v1/orders/"+id.String(), refundBody(refund))
	})
}

func (a *API) getOrder(c echo.Context) error {
	id, err := pathID(c, orders.ErrNotFound)
	if err != nil {
		return err
	}
	return a.read(c, func(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID) (any, error) {
		order, err := orders.GetTx(ctx, tx, tenantID, id)
		return orderBody(order), err
	})
}

func (a *API) listOrders(c echo.Context) error {
	before, limit, err := page(c)
	if err != nil {
		return err
	}
	return a.read(c, func(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID) (any, error) {
		list, err := orders.ListTx(ctx, tx, tenantID, before, limit)
		if err != nil {
			return nil, err
		}
		answer := struct {
			Orders     []orderResponse `json:"orders"`
			NextCursor *string         `json:"next_cursor"`
		}{Orders: []orderResponse{}}
		for _, order := range list {
			answer.Orders = append(answer.Orders, orderBody(order))
		}
		if len(list) == limit {
			answer.NextCursor = cursor(list[limit-1].ID)
		}
		return answer, nil
	})
}

var errPage = failure.New(failure.Invalid, "page-invalid", "The page asked for is not one.")

const (
	usualPage   = 20
	largestPage = 100
)

// page reads limit and cursor. A cursor is opaque to the client: it is the id
// after which, newest first, the next page begins.
func page(c echo.Context) (before uuid.UUID, limit int, err error) {
	before, limit = uuid.Max, usualPage
	if text := c.QueryParam("limit"); text != "" {
		limit, err = strconv.Atoi(text)
		if err != nil || limit < 1 || limit > largestPage {
			return before, limit, errPage.WithFields(failure.Field{Field: "limit", Detail: "must be a whole number from 1 to 100"})
		}
	}
	if text := c.QueryParam("cursor"); text != "" {
		raw, err := base64.RawURLEncoding.DecodeString(text)
		if err == nil {
			before, err = uuid.FromBytes(raw)
		}
		if err != nil {
			return before, limit, errPage.WithFields(failure.Field{Field: "cursor", Detail: "must be the next_cursor of an earlier page"})
		}
	}
	return before, limit, nil
}

func cursor(id uuid.UUID) *string {
	text := base64.RawURLEncoding.EncodeToString(id[:])
	return &text
}

type orderResponse struct {
	ID             uuid.UUID        `json:"id"`
	Status         orders.Status    `json:"status"`
	Version        int64            `json:"version"`
	CustomerID     string           `json:"customer_id"`
	CustomerEmail  string           `json:"customer_email"`
	Currency       money.Currency   `json:"currency"`
	Lines          []event.Line     `json:"lines"`
	Taxes          []event.Tax      `json:"taxes"`
	NetAmount      int64            `json:"net_amount"`
	TaxAmount      int64            `json:"tax_amount"`
	TotalAmount    int64            `json:"total_amount"`
	RefundedAmount int64            `json:"refunded_amount"`
	Metadata       json.RawMessage  `json:"metadata"`
	CreatedAt      time.Time        `json:"created_at"`
	UpdatedAt      time.Time        `json:"updated_at"`
	Payment        *paymentResponse `json:"payment,omitempty"`
}

type paymentResponse struct {
	Reference string    `json:"reference"`
	Amount    int64     `json:"amount"`
	PaidAt    time.Time `json:"paid_at"`
}

func orderBody(order orders.Order) orderResponse {
	body := orderResponse{
		ID:             order.ID,
		Status:         order.Status,
		Version:        order.Version,
		CustomerID:     order.CustomerID,
		CustomerEmail:  order.CustomerEmail,
		Currency:       order.Currency,
		Taxes:          taxBodies(order.Taxes),
		NetAmount:      order.NetAmount,
		TaxAmount:      order.TaxAmount,
		TotalAmount:    order.TotalAmount,
		RefundedAmount: order.RefundedAmount,
		Metadata:       order.Metadata,
		CreatedAt:      order.CreatedAt,
		UpdatedAt:      order.UpdatedAt,
	}
	for _, line := range order.Lines {
		body.Lines = append(body.Lines, event.Line(line))
	}
	if order.Payment != nil {
		payment := paymentResponse(*order.Payment)
		body.Payment = &payment
	}
	return body
}

type refundResponse struct {
	ID         uuid.UUID   `json:"id"`
	OrderID    uuid.UUID   `json:"order_id"`
	Amount     int64       `json:"amount"`
	NetAmount  int64       `json:"net_amount"`
	TaxAmount  int64       `json:"tax_amount"`
	Taxes      []event.Tax `json:"taxes"`
	Reason     string      `json:"reason"`
	RefundedAt time.Time   `json:"refunded_at"`
}

func refundBody(refund orders.Refund) refundResponse {
	return refundResponse{
		ID: refund.ID, OrderID: refund.OrderID,
		Amount: refund.Amount, NetAmount: refund.NetAmount, TaxAmount: refund.TaxAmount,
		Taxes: taxBodies(refund.Taxes), Reason: refund.Reason, RefundedAt: refund.RefundedAt,
	}
}

func taxBodies(taxes []orders.Tax) []event.Tax {
	bodies := make([]event.Tax, len(taxes))
	for i, tax := range taxes {
		bodies[i] = event.Tax(tax)
	}
	return bodies
}
